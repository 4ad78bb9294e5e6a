"""Inner attentions: modules from split heads to outputs."""
