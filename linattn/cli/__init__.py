"""The command line: `linattn train`, `generate` and `info`. Heavy packages are imported when a command runs."""
