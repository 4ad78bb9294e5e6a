"""The command line: `linattn train`, `generate`, `info`, `bench`. Heavy packages are imported when a command runs."""
