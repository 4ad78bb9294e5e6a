"""Imported last by the process of which tests start copies: exempts what it has imported from the garbage collector, as
each copy would search a million objects after every run of a Trainer, and copy the memory that they lie in."""

import gc

gc.freeze()
