"""Parts that the commands share: the search for files, atomic writes, errors of one line, learning rates, and pages of
reports."""
