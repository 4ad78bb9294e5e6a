"""linear-attention-transformer: its constructors, with our attention behind them."""
