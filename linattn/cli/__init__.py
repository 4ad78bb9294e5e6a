"""The command line: `linattn train`, `linattn generate` and `linattn info`; heavy packages are imported when a command runs."""
