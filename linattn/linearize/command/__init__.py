"""The stages of `linattn linearize`, whose options `linattn.cli.linearize` has."""
