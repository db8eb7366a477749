"""An untouched server passes every time: a probe that is sometimes not sure would be switched off."""

import pytest

from hsnb import probe

pytestmark = pytest.mark.engine("tiny")


def test_twenty_times_in_a_row_without_a_not_proved(engine):
    server = engine("tiny")
    folder = server.deployment.model_path()
    seen = []
    for n in range(20):
        gathered = probe.gather(server, probe.fixed_prompts(folder))
        try:
            seen.append(probe.judge(gathered, folder, reference=n == 0).verdict)  # transformers says the same each time
        finally:
            gathered.free()
    assert seen == ["PASS"] * 20
