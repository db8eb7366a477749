"""The suite is nothing without real engines: count them."""

import pytest

from tests.conftest import ENGINE_STARTS_NEEDED


@pytest.mark.engine
@pytest.mark.notebook
def test_zz_enough_real_engines_were_started(engine_starts, request):
    """Runs last. Asked of whole runs only: a selection of tests starts what it needs."""
    option = request.config.option
    if request.config.args_source.name == "TESTPATHS" and option.markexpr in ("", "engine or notebook") and not option.keyword:
        assert len(engine_starts.seen) >= ENGINE_STARTS_NEEDED, engine_starts.seen
