"""Looking at finished runs: VNet's surfaces, curves, second wordings, and the paper's theory beside them."""
