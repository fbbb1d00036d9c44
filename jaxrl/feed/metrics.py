"""The metrics that a run writes."""

from functools import partial

from jaxrl.feed.schema import Kind, Metric, Population, Registry


def _metric(
    name: str,
    unit: str,
    kind: Kind,
    meaning: str,
    formula: str = "",
    *,
    population: Population = "",
    labels: tuple[str, ...] = (),
) -> Metric:
    return Metric(
        name=name,
        unit=unit,
        kind=kind,
        meaning=meaning,
        formula=formula,
        population=population,
        labels=labels,
    )


_sampled = partial(_metric, population="sampled")
_trained = partial(_metric, population="trained")
_held_out = partial(_metric, population="held_out")

_SAMPLED = [
    _sampled("reward/mean", "1", "ratio", "mean reward", "Σ reward / graded"),
    _trained("reward/trained", "1", "ratio", "mean reward in the loss", "Σ reward / kept"),
    _trained("reward/overlong", "1", "ratio", "what long episodes lost of their reward", "Σ mean / groups"),
    _sampled("reward/pass_rate", "1", "ratio", "tasks repaired", "resolved / voting"),
    _sampled("groups/mixed", "1", "ratio", "groups with unequal rewards", "mixed / groups"),
    _sampled("groups/drawn", "groups", "gauge", "groups of the step, with those drawn for equal ones"),
    _sampled("groups/missing", "groups", "gauge", "mixed groups that dynamic sampling did not find"),
    _sampled("groups/all_pass", "1", "ratio", "groups all of whose rollouts resolve"),
    _sampled("groups/all_fail", "1", "ratio", "groups none of whose rollouts resolve"),
    _metric("groups/waiting", "groups", "gauge", "finished ahead of their step, when a step ends"),
    _metric("groups/in_flight", "groups", "gauge", "in the making for later steps, when a step ends"),
    _metric("groups/regenerated", "groups", "gauge", "too stale for their step, generated anew"),
    _sampled(
        "rollouts/outcome", "rollouts", "gauge", "rollouts of the step by how they ended", labels=("outcome",)
    ),
    _sampled("rollouts/retried", "rollouts", "gauge", "rollouts run again after a fault"),
    _sampled("rollouts/turns", "turns", "ratio", "turns of an episode", "turns / rollouts"),
    _sampled("rollouts/length", "tokens", "ratio", "length of an episode", "tokens / rollouts"),
    _sampled("tokens/sampled", "tokens", "gauge", "tokens that the model wrote in the step"),
    _sampled("tokens/context", "tokens", "gauge", "tokens of prompts and tool output"),
    _trained("tokens/trained", "tokens", "gauge", "tokens in the loss"),
    _trained("tokens/packing", "1", "ratio", "use of packed rows", "tokens / (rows × length)"),
]

_TIME = [
    _metric("time/step", "s", "gauge", "wall clock of the step, evaluation and checkpoint apart"),
    _metric("time/generation", "s", "gauge", "start of the step until its last group is at hand"),
    _metric("time/engine", "s", "gauge", "generation on the device: prefill and decode, for any step"),
    _metric("time/grading", "s", "gauge", "hidden tests, summed over rollouts"),
    _metric("time/tools", "s", "gauge", "tool calls, summed over rollouts"),
    _metric("time/training", "s", "gauge", "gradients and update on the device"),
    _metric("time/sync", "s", "gauge", "hand-over of the weights, with the wait for running turns"),
    _metric("time/idle", "s", "gauge", "device thread without a job", "step - engine - training"),
    _metric("time/idle_share", "1", "ratio", "share of the step without a device job", "idle / step"),
    _metric("time/checkpoint", "s", "gauge", "training held up by a checkpoint"),
    _metric("time/evaluation", "s", "gauge", "evaluation after the step"),
]

_TRAIN = [
    _trained("train/loss", "1", "gauge", "policy loss", "Σ token loss / tokens"),
    _trained("sft/loss", "nat", "gauge", "weighted cross-entropy", "Σ weight × -log p / Σ weight"),
    _trained("train/aux_loss", "1", "gauge", "load-balance loss of the router, unweighted"),
    _trained("train/grad_norm", "1", "gauge", "global norm before clipping"),
    _metric("train/learning_rate", "1", "gauge", "of the last update"),
    _metric(
        "train/updates",
        "updates",
        "gauge",
        "optimizer updates of the step; 0 if nothing was left to train on",
    ),
    _metric("train/version", "1", "gauge", "weight version after the step"),
    _trained("train/entropy", "nat", "ratio", "of the full softmax at sampled positions", "Σ H / tokens"),
    _trained("train/clipped", "1", "ratio", "tokens whose ratio is clipped", "clipped / tokens"),
    _trained("train/ratio", "1", "ratio", "probability ratio, new to old", "Σ ratio / tokens"),
    _trained("train/kl", "nat", "ratio", "estimated distance to the reference policy", "Σ KL / tokens"),
    _trained(
        "train/importance_zero",
        "1",
        "ratio",
        "tokens that the importance correction drops",
        "dropped / tokens",
    ),
    _trained("train/dropped", "tokens", "gauge", "tokens left out for the log-prob error of their sequence"),
    _trained("train/advantage_size", "1", "ratio", "size of the advantage", "Σ |A| / rollouts"),
    _trained(
        "train/logprob_error_mean", "nat", "ratio", "sampler against trainer, same weights", "Σ |Δ| / tokens"
    ),
    _trained("train/logprob_error_max", "nat", "gauge", "sampler against trainer, same weights", "max |Δ|"),
    _trained("train/mismatch_kl", "nat", "ratio", "sampler to trainer", "Σ (r - 1 - log r) / tokens"),
    _trained("train/staleness", "versions", "ratio", "age of tokens at their step's start", "Σ age / tokens"),
    _trained("train/staleness_max", "versions", "gauge", "age of the oldest token at its step's start"),
    _trained(
        "moe/load_violation", "1", "gauge", "fullest expert over all layers", "max load / mean load - 1"
    ),
]

_ENGINE = [
    _metric("engine/busy", "1", "ratio", "occupied slots while decoding", "Σ busy slots / Σ slots"),
    _metric("engine/decoded", "tokens", "counter", "tokens sampled"),
    _metric("engine/prefilled", "tokens", "counter", "tokens prefilled"),
    _metric("engine/distinct", "tokens", "counter", "distinct tokens among those prefilled; equal is ideal"),
    _metric("engine/dispatches", "1", "counter", "device programs started"),
]

_HOSTS = [
    _metric("sandbox/created", "sandboxes", "counter", "sandboxes started"),
    _metric("sandbox/alive", "sandboxes", "gauge", "most at once in the step"),
    _metric("sandbox/start_seconds", "s", "ratio", "start of a sandbox", "Σ seconds / started"),
    _metric("sandbox/calls", "calls", "counter", "tool calls"),
    _metric("sandbox/faults", "1", "counter", "failures of a sandbox itself"),
    _metric("grader/verdicts", "verdicts", "counter", "rollouts graded"),
    _metric("grader/cached", "verdicts", "counter", "of these, known from an equal diff"),
    _metric("process/memory", "B", "gauge", "resident memory of the controller"),
    _metric("feed/lost_rows", "rows", "counter", "rows that could not be written"),
]

_SET = ("k", "temperature", "top_p")
_EVALUATION = [
    _held_out(
        "eval/pass_at",
        "1",
        "gauge",
        "unbiased pass@k, mean over tasks",
        "1 - C(n-c, k) / C(n, k)",
        labels=_SET,
    ),
    _held_out(
        "eval/pass_at_low", "1", "gauge", "lower end of its 95% interval", "bootstrap over tasks", labels=_SET
    ),
    _held_out(
        "eval/pass_at_high",
        "1",
        "gauge",
        "upper end of its 95% interval",
        "bootstrap over tasks",
        labels=_SET,
    ),
    _held_out(
        "eval/rollouts",
        "rollouts",
        "gauge",
        "rollouts of the evaluation by how they ended",
        labels=("outcome", "temperature", "top_p"),
    ),
]

METRICS = Registry([*_SAMPLED, *_TIME, *_TRAIN, *_ENGINE, *_HOSTS, *_EVALUATION])
