"""Looking at finished runs: VNet's surfaces, learning curves and second wordings."""
