"""The data of a command: text becomes rows of tokens on the disk, from which windows are read."""
