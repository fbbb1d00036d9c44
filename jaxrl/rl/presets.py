"""Published algorithms as tables of settings of the section `rl`; what a table leaves out is the default.

Where a paper leaves a value open, the table does too. Formulas and sources: `jaxrl/rl/README.md`.
"""

from collections.abc import Mapping
from typing import Any, Literal

Preset = Literal["grpo", "mlperf_v6_1", "dr_grpo", "dapo", "gspo", "cispo"]

_GROUP_MEAN = {"baseline": "mean", "normalise_std": True, "drop_equal_groups": False}

PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    # arXiv:2402.03300, section 4.1.1 and equation 3.
    "grpo": _GROUP_MEAN
    | {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "normalisation": "sequence",
        "kl": {"coefficient": 0.04, "estimator": "k3", "reference": "start"},
    },
    # The reference of MLPerf Training v6.1, qwen35_397b_grpo. Its ratio is pinned to 1, so clipping is inert.
    "mlperf_v6_1": {
        "group_size": 16,
        "updates_per_step": 1,
        "baseline": "leave_one_out",
        "normalise_std": True,
        "masked_vote": True,
        "masked_outcomes": ["context_full"],
        "ratio": "on_policy",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "importance": {"kind": "sequence_mask", "low": 0.999, "high": 1.002},
        "sequence_error_limit": 2.0,
        "normalisation": "token",
        "drop_equal_groups": False,
        "router": "frozen",
    },
    # arXiv:2503.20783: neither length nor standard deviation in the denominators.
    "dr_grpo": _GROUP_MEAN
    | {"normalise_std": False, "clip_low": 0.2, "clip_high": 0.2, "normalisation": "constant"},
    # arXiv:2503.14476: its dynamic sampling draws until the batch is full; here it has a bound.
    "dapo": _GROUP_MEAN
    | {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "normalisation": "token",
        "overlong": {"penalty": 1.0},
        "drop_equal_groups": True,
        "dynamic_sampling_rounds": 10,
    },
    # arXiv:2507.18071, section 5.1.
    "gspo": _GROUP_MEAN
    | {"objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "normalisation": "sequence"},
    # arXiv:2506.13585, section 3.1: no lower bound; it does not say the upper one, 5 is ScaleRL's
    # (arXiv:2510.13786).
    "cispo": _GROUP_MEAN
    | {"objective": "cispo", "clip_low": 1.0, "clip_high": 4.0, "normalisation": "token"},
}


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with the values of its `preset` where it has none; as it is where there is no such preset."""
    table = next((values for name, values in PRESETS.items() if name == given.get("preset")), {})
    return _filled(given, table)


def _filled(given: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    filled = {**below, **given}
    for key, value in given.items():
        if isinstance(value, Mapping) and isinstance(below.get(key), Mapping):
            filled[key] = _filled(value, below[key])
    return filled
