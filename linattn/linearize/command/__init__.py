"""The command `linattn linearize`, whose options are in `linattn.cli.linearize`."""
