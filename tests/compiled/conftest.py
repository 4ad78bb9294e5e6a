"""What all tests of compiled code share."""

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def fresh_cache(tmp_path_factory):
    """Compile what today's code says: torch's cache knows a graph by its operators' names, and would return what an
    older version of them was compiled to."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    base = tmp_path_factory.getbasetemp()
    # the processes of one run share it, so that the headers are compiled once
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(base / "inductor")
    yield
    if folder is None:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    else:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
