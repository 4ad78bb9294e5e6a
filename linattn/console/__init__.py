"""Parts that the commands share: the search for files, atomic writes, errors of one line, and pages of reports."""
