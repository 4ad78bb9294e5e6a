"""The tests, and how they check annotations: `pytest --jaxtyping-packages=linattn,tests.checked`."""

from beartype import BeartypeConf, beartype

# an int is a float to every type checker (PEP 484), so it is one here
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
