"""The settings of a run: one frozen model per section, each field with its meaning beside it.

Defaults live here and in `jaxrl.machine_options`, nowhere else; `configs/*.yaml` state only what differs.
`jaxrl.config` loads them.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from jaxrl.machine_options import Engine, Grader, Mesh, Sandbox
from jaxrl.rl.presets import Preset, with_preset
from jaxrl.section import Count, NonNegative, Positive, Probability, Section, Whole

Outcome = Literal[
    "resolved",
    "unresolved",
    "malformed",
    "stuck_in_loop",
    "max_turns",
    "agent_timeout",
    "sandbox_oom",
    "context_full",
    "suspected_tampering",
]
"""How a rollout may end that is no fault of the machinery; see `jaxrl.contracts.Outcome`."""


class Run(Section):
    """Identity and length of the run."""

    output_dir: str = "runs"
    """Folder that holds runs."""
    run_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "quickstart"
    """Folder of this run in it; starting the same name again resumes it."""
    seed: Whole = 0
    """Seed of task order and of every sampled token."""
    steps: Whole = 34
    """Optimizer steps in all, resumed ones included."""


class Model(Section):
    """What is trained."""

    preset: str = "quickstart"
    """Sizes of the model, by name of the preset; only where `checkpoint` is null."""
    checkpoint: str | None = "configs/quickstart/start"
    """Folder of starting weights; null starts from random ones."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of parameters and activations; null: the checkpoint's own, or the preset's."""
    tokenizer: str = "configs/quickstart/tokenizer.json"
    """Tokenizer file."""


class Tasks(Section):
    """Which tasks; the three splits share no content."""

    set: Literal["generated", "projects", "r2e_gym"] = "generated"
    """Task set: generated ones, recipes of real projects, or the benchmark's rows."""
    definitions: str = "configs/tasks"
    """Folder of recipes; projects only."""
    train_projects: tuple[str, ...] = ()
    """Projects to train on; projects only, and empty: all that are held out nowhere."""
    validation_projects: tuple[str, ...] = ("sqlparse",)
    """Projects held out for evaluation; projects only."""
    test_projects: tuple[str, ...] = ()
    """Projects kept for the very end; projects only."""
    per_project: Count | None = None
    """Most tasks of each project, taken evenly from its list; projects only, and null: all."""
    train_rows: str | None = None
    """JSONL file of rows; r2e_gym only."""
    validation_rows: str | None = None
    """JSONL file of rows; r2e_gym only."""
    test_rows: str | None = None
    """JSONL file of rows; r2e_gym only."""
    images: str | None = None
    """Folder of SIF images; r2e_gym only."""
    train_count: Count = 1200
    """Tasks to train on; this and the other counts for generated tasks only."""
    validation_count: Count = 251
    """Tasks for evaluation during and after training."""
    test_count: Count = 251
    """Tasks kept for the very end."""
    seed: Whole = 0
    """Seed of the generated tasks."""


class Harness(Section):
    """How the agent works: prompts, tools and limits of an episode."""

    name: Literal["compact", "openhands"] = "compact"
    """Prompt templates and tools."""
    max_turns: Count | None = None
    """Turns of the model in one episode; null: what the harness has, 6 for compact, 30 for openhands."""
    turn_tokens: Count | None = None
    """Tokens sampled in one turn; null: what the harness has, 64 for compact, no bound for openhands."""
    system_prompt: str | None = None
    """Jinja file of the system turn; null: the harness's own. openhands only."""
    user_prompt: str | None = None
    """Jinja file of the first user turn; null: the harness's own. openhands only."""
    tool_texts: str | None = None
    """JSON file that describes the tools in the prompt; null: the harness's own. openhands only."""
    soft_timeout: Positive = 30.0
    """Seconds without new output after which execute_bash leaves a command running."""
    normalise_output: bool = True
    """Hide times, process ids, addresses and names of scratch files in the output of execute_bash."""
    detect_loops: bool | None = None
    """End an episode that goes in circles; null: what the harness has, on for openhands alone."""


class Sampling(Section):
    """The distribution that training rollouts are drawn from."""

    temperature: NonNegative = 1.0
    """0 is greedy."""
    top_p: Probability = 1.0
    """Smallest set of tokens that holds this probability; 1 is off."""
    top_k: Whole = 0
    """Most likely tokens kept; 0 is off."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Least probability relative to the most likely token; 0 is off."""


class Importance(Section):
    """Weight of a token for the gap between sampler and trainer, where `rl.ratio` does not hold it."""

    kind: Literal["none", "truncated", "sequence_mask"] = "none"
    """A token's weight up to `high`; or untruncated, in sequences whose mean weight is in [low, high]."""
    low: NonNegative = 0.0
    """Least geometric mean of a sequence's weights; sequence_mask only."""
    high: Positive = 2.0
    """Largest weight of a token, or geometric mean of a sequence's."""


class KL(Section):
    """Distance to a reference policy, as a term of the loss."""

    coefficient: NonNegative = 0.0
    """Weight of the term; 0 is off, and then no reference is loaded."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """From d = log p - log p of the reference: d, d^2 / 2, or exp(-d) - 1 + d."""
    reference: str | None = None
    """`start`: the weights that the run starts from; else the folder of others."""


class Overlong(Section):
    """Penalty on long episodes, added to the reward before advantages (DAPO's soft punishment)."""

    penalty: NonNegative = 0.0
    """Deduction at full length and beyond; 0 is off."""
    length: Count | None = None
    """Tokens of an episode at which the deduction is full; null: engine.context."""
    cache: Count | None = None
    """Tokens before that over which it grows; null: a fifth of the length."""


class LoRA(Section):
    """Low-rank adapters."""

    rank: Count = 16
    """Inner width of an adapter."""
    alpha: Positive = 32.0
    """An adapter's product counts alpha / rank."""
    targets: Annotated[tuple[Literal["attention", "gdn", "mlp", "experts"], ...], Field(min_length=1)] = (
        "attention",
        "gdn",
        "mlp",
    )
    """Parts of each layer whose matrices get one; mlp has the shared expert."""


class RL(Section):
    """GRPO and its relatives."""

    preset: Preset | None = None
    """A published algorithm: values for the keys below that are set nowhere; null: the defaults."""
    prompts_per_step: Count = 16
    """Tasks of a step."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts of each task, compared with one another."""
    updates_per_step: Count = 1
    """Optimizer updates that share a step's rollouts."""
    max_staleness: Whole = 0
    """Weight versions by which a trained token may be older than its step's start; 0 trains synchronously."""
    weight_update: Literal["drain", "in_flight"] = "drain"
    """New weights wait for running turns, or come in the middle of them; asynchronous training only."""
    baseline: Literal["leave_one_out", "mean"] = "leave_one_out"
    """What a reward is compared with in its group."""
    normalise_std: bool = False
    """Divide advantages by the group's standard deviation."""
    masked_vote: bool = False
    """Rollouts that are not trained all count in their group's baseline, as 0 where they have no reward."""
    masked_outcomes: tuple[Outcome, ...] = ()
    """Outcomes to leave out of the loss besides faults; context_full is overlong filtering."""
    overlong: Overlong = Overlong()
    """Penalty on long episodes."""
    objective: Literal["ppo", "gspo", "gspo_token", "cispo"] = "ppo"
    """Ratio clipped by token, by sequence, by sequence with a token's gradient; or bounded as a weight."""
    ratio: Literal["on_policy", "sampler", "recomputed"] = "sampler"
    """Probability ratio to: itself (always 1), the sampler, or the trainer before the step's first update."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The probability ratio counts down to 1 - this."""
    clip_high: Positive = 0.28
    """The probability ratio counts up to 1 + this."""
    clip_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: the ratio counts up to this where the advantage is negative; null is off."""
    importance: Importance = Importance()
    """Correction between sampler and trainer."""
    sequence_error_limit: Annotated[float, Field(gt=1)] | None = None
    """Leave out sequences whose mean exp|log p sampler - trainer| is above; null is off."""
    normalisation: Literal["token", "sequence", "constant"] = "token"
    """Mean over tokens, over sequences' means, or over sequences' sums divided by `constant_length`."""
    constant_length: Count | None = None
    """Tokens that a sequence's sum is divided by; null: engine.context; constant only."""
    kl: KL = KL()
    """Distance to a reference policy."""
    drop_equal_groups: bool = True
    """Leave out groups whose rewards are all equal: they carry no gradient."""
    dynamic_sampling_rounds: Whole = 0
    """Further draws of tasks for a step, each of as many as it lacks groups of unequal rewards; 0 is off."""
    router: Literal["trained", "frozen", "replayed"] = "trained"
    """The router's weights are trained, kept, or trained on the very experts that the sampler chose."""
    lora: LoRA | None = None
    """Train low-rank adapters in place of the weights; null: the weights."""
    aux_loss_coefficient: NonNegative = 0.0
    """Weight of the router's load-balance loss."""
    z_loss_coefficient: NonNegative = 0.0
    """Weight of the squared log-normaliser of the softmax: keeps logits small, hence exact."""
    shuffle_rewards: bool = False
    """Control experiment: rewards permuted over the whole step, so nothing can be learnt."""
    row_length: Count = 384
    """Tokens of a packed row."""
    rows_per_microbatch: Count = 8
    """Packed rows of one gradient accumulation."""
    remat: bool = False
    """Compute each layer again in the backward pass in place of keeping what it made."""

    @model_validator(mode="before")
    @classmethod
    def _preset_below(cls, given: Any) -> Any:
        """The preset's values where `given` has none."""
        return with_preset(given) if isinstance(given, dict) else given


class Optimizer(Section):
    """AdamW after global-norm clipping."""

    learning_rate: Positive = 4e-4
    """Peak."""
    schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up; cosine falls to 0 at the last step."""
    warmup_steps: Whole = 3
    """Updates of linear warm-up."""
    b1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    b2: Annotated[float, Field(ge=0, lt=1)] = 0.98
    """Decay of the second moment."""
    eps: Positive = 1e-6
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.0
    """Decoupled."""
    clip_norm: Positive = 1.0
    """Largest global norm of a gradient."""


class Evaluation(Section):
    """Held-out tasks, sampled anew."""

    every: Whole = 0
    """Steps between evaluations; 0 evaluates at start and end only."""
    seed: Whole = 1_000_003
    """Seed of every sampled token; equal seeds make evaluations comparable in pairs."""
    split: Literal["validation", "test"] = "validation"
    """Held-out split; the test split is for `python -m jaxrl.eval` alone."""
    inline_tasks: Count = 64
    """Tasks of an evaluation between start and end; those two take the whole split."""
    samples: Count = 4
    """Rollouts of each, so that pass@1 to pass@samples are known."""
    sampling_sets: Annotated[tuple[tuple[NonNegative, Probability], ...], Field(min_length=1)] = (
        (1.0, 1.0),
        (0.1, 0.95),
    )
    """(temperature, top_p) of each evaluation."""


class SFT(Section):
    """Supervised fine-tuning (`python -m jaxrl.sft`)."""

    data: tuple[str, ...] = ()
    """Files of conversations, one JSON object a line, read in this order as one set."""
    steps: Count = 800
    """Optimizer updates."""
    rows: Count = 10
    """Packed rows of an update."""
    row_length: Count = 256
    """Tokens of a packed row."""
    aux_loss_coefficient: NonNegative = 1e-3
    """Weight of the router's load-balance loss."""
    z_loss_coefficient: NonNegative = 0.0
    """Weight of the squared log-normaliser of the softmax."""


class Checkpoint(Section):
    """What a killed run goes on from."""

    every: Count = 5
    """Steps between checkpoints; the last step always has one."""
    keep: Count = 3
    """Newest ones kept."""


class Replay(Section):
    """Playing known fixes (`python -m jaxrl.replay`)."""

    splits: Annotated[tuple[Literal["train", "validation", "test"], ...], Field(min_length=1)] = (
        "train",
        "validation",
    )
    """Whose tasks are played."""


class Config(Section):
    """All settings of a run."""

    run: Run = Run()
    model: Model = Model()
    mesh: Mesh = Mesh()
    tasks: Tasks = Tasks()
    harness: Harness = Harness()
    sampling: Sampling = Sampling()
    engine: Engine = Engine()
    sandbox: Sandbox = Sandbox()
    grader: Grader = Grader()
    rl: RL = RL()
    optimizer: Optimizer = Optimizer()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    sft: SFT = SFT()
    replay: Replay = Replay()
