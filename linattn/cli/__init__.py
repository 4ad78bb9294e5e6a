"""The command line: `linattn train`, `generate`, `read`, `serve`, `info`, `linearize`, `bench`. Heavy packages are
imported when a command runs."""
