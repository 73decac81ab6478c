import pytest

from backend.errors import OverloadedError
from backend.pipeline.worker_pool import Quota


def test_calls_beyond_the_quota_are_refused_until_one_ends():
    quota = Quota(2, "transcriptions")
    with quota.taken():
        with quota.taken(), pytest.raises(OverloadedError, match="2 transcriptions are running"):
            quota.taken().__enter__()
        with quota.taken():
            pass


def test_a_call_that_fails_gives_its_place_back():
    quota = Quota(1, "transcriptions")
    with pytest.raises(ValueError, match="broken"), quota.taken():
        raise ValueError("broken")
    with quota.taken():
        pass
