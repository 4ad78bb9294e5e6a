"""transformers' hybrid models with our scans in the place of theirs."""
