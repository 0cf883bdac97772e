"""Lightning callbacks: what a run shows and writes down."""
