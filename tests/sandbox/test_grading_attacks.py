"""Every attack scores 0: with the static scan, and in the run alone where the scan is turned off."""

import ast
import dataclasses
from collections.abc import Iterator, Mapping

import pytest
from attacks.inside import ASSERTIONS, ENDINGS, HOGS, LIARS, PROCESSES, REPORTS
from attacks.outside import FILES, REFUSED
from grading_project import BROKEN, FIXED, Bench, bench, shop_suite

from sandbox.grading import suite_trial
from sandbox.grading.scan import scan

pytestmark = pytest.mark.sandbox
HIDDEN = shop_suite()
CHEAPEST = BROKEN[BROKEN.index("def cheapest") :]
PREFIXES = {**REPORTS, **ASSERTIONS, **ENDINGS, **PROCESSES}
SOURCES = {
    **{name: prefix + BROKEN for name, prefix in PREFIXES.items()},
    **{name: liar + CHEAPEST for name, liar in LIARS.items()},
}
# The run of these shows what they are; of the others, only that they do not work.
EXPOSED = {*REPORTS, *ASSERTIONS, *LIARS} - {
    "a plugin that drops what fails",
    "the session's exit status",
    "AssertionError is a skip",
    "a tracer ends tests early",
    "descriptors say passed",
    "assertions of unittest do nothing",
    "raises accepts everything",
    "known tests get what they want",
    "the answer taken from the caller's constants",
    "json says passed",
}
# Beyond the rules: plain code, or code whose doing is all there is to see.
UNSEEN = {
    "a forged summary",
    "sys.exit(0) at import",
    "the tests' folder becomes a link",
    "an answer equal to what it was equal to before",
}


@pytest.fixture(scope="module")
def shop() -> Iterator[Bench]:
    with bench() as made:
        yield made


@pytest.fixture
def without_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_trial, "screen", lambda patch, originals: (patch, []))


def settled(shop: Bench) -> None:
    """The next honest patch is not disturbed."""
    assert shop.fresh().grade({"shop/sums.py": FIXED}, HIDDEN).status == "resolved"


@pytest.mark.slow
@pytest.mark.usefixtures("without_scan")
@pytest.mark.parametrize("name", SOURCES)
def test_attack_from_inside_scores_nothing(shop: Bench, name: str) -> None:
    verdict = shop.fresh().grade({"shop/sums.py": SOURCES[name]}, HIDDEN, shop.task(seconds=20.0))
    assert verdict.status in (("tampering",) if name in EXPOSED else ("tampering", "unresolved")), verdict


@pytest.mark.parametrize("name", SOURCES)
def test_the_scan_sees_what_an_attack_reaches_for(name: str) -> None:
    ast.parse(SOURCES[name])  # what does not parse attacks nothing
    before = {"shop/sums.py": BROKEN.encode()}
    hits = scan(before, {"shop/sums.py": SOURCES[name].encode()})
    assert bool(hits) == (name not in UNSEEN), hits


@pytest.mark.slow
@pytest.mark.parametrize("changes", FILES.values(), ids=FILES)
def test_attack_by_files_scores_nothing(shop: Bench, changes: Mapping[str, str | bytes | None]) -> None:
    verdict = shop.fresh().grade({"README.md": "x", **changes}, HIDDEN)
    assert verdict.status in ("unresolved", "tampering"), verdict


@pytest.mark.slow
@pytest.mark.parametrize("changes", FILES.values(), ids=FILES)
def test_the_same_files_beside_a_fix_change_nothing(
    shop: Bench, changes: Mapping[str, str | bytes | None]
) -> None:
    verdict = shop.fresh().grade({**changes, "shop/sums.py": FIXED}, HIDDEN)
    assert verdict.status in ("resolved", "tampering"), verdict


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED)
def test_what_no_honest_patch_has_is_refused(shop: Bench, changes: Mapping[str, str | bytes | None]) -> None:
    verdict = shop.fresh().grade({**changes, "shop/sums.py": FIXED}, HIDDEN)
    assert verdict.status == "tampering" and verdict.seconds == 0.0, verdict


@pytest.mark.slow
@pytest.mark.usefixtures("without_scan")
@pytest.mark.parametrize("source", HOGS.values(), ids=HOGS)
def test_hogs_end_in_time_and_score_nothing(shop: Bench, source: str) -> None:
    verdict = shop.fresh().grade({"shop/sums.py": source + FIXED}, HIDDEN, shop.task(seconds=5.0))
    assert verdict.status in ("unresolved", "tampering"), verdict
    assert verdict.seconds < 120
    settled(shop)


@pytest.mark.slow
@pytest.mark.usefixtures("without_scan")
def test_guessing_is_no_strategy(shop: Bench) -> None:
    """Equal to everything in the first process of a sandbox, to nothing in the next: one bit at a time."""
    one = dataclasses.replace(HIDDEN, fail_to_pass=HIDDEN.fail_to_pass[:1])
    guess = """
import os
FIRST = not os.path.exists("/tmp/mark")
open("/tmp/mark", "a").close()
class Sum(int):
    def __eq__(self, other): return FIRST
    __hash__ = int.__hash__
def total(prices): return Sum(0)
"""
    verdicts = [shop.fresh().grade({"shop/sums.py": guess + CHEAPEST}, one).status for _ in range(10)]
    assert verdicts.count("resolved") <= 4, verdicts  # by chance more often once in 5000 runs
    assert shop.fresh().grade({"shop/sums.py": FIXED}, one).status == "resolved"


@pytest.mark.slow
@pytest.mark.usefixtures("without_scan")
def test_what_equals_everything_fails_where_the_test_has_no_literal(shop: Bench) -> None:
    equal = tuple(each for each in HIDDEN.fail_to_pass if "equal_prices" in each)
    liar = LIARS["a number equal to everything"] + CHEAPEST
    one = dataclasses.replace(HIDDEN, fail_to_pass=equal)
    verdicts = {shop.fresh().grade({"shop/sums.py": liar}, one).status for _ in range(3)}
    assert "tampering" in verdicts, verdicts  # a challenge that changes the liar's own side shows nothing
