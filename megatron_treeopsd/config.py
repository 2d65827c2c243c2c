"""The keys of a recipe, their types, meanings, defaults and bounds. `recipes.py` reads recipes from files and words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class RecipeError(ValueError):
    """A recipe that cannot be used; the message says which key, why, and what to do."""


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, every number finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


# --------------------------------------------------------------------------------------------------- model and task
class Model(Section):
    """Where the policy comes from. Its shape is read from the checkpoint's own `config.json`."""

    checkpoint: Path = Field(description="Hugging Face folder, or one that treeopsd convert to-megatron made")
    dtype: Literal["float32", "bfloat16"] = "float32"
    recompute: bool = Field(False, description="recompute activations layer by layer in the backward pass")


class Retrieval(Section):
    """The search tool behind `<search>`."""

    name: Literal["bm25"] = "bm25"
    top_k: int = Field(2, ge=1, le=100, description="passages returned for one query")
    k1: float = Field(1.2, gt=0)
    b: float = Field(0.75, ge=0, le=1)
    title_weight: int = Field(1, ge=1, description="how often the words of a title count, those of the text once")


class Task(Section):
    """Questions, the environment they are answered in, and the budgets of one trajectory."""

    name: str
    data: Path = Field(description="folder with passages.jsonl, train.jsonl, dev.jsonl and test.jsonl")
    environment: Literal["search"] = "search"
    retrieval: Retrieval = Retrieval()
    max_turns: int = Field(5, ge=1, description="assistant turns of one trajectory")
    max_turn_tokens: int = Field(24, ge=1, description="sampled tokens of one turn")
    max_context_tokens: int = Field(320, ge=8, description="tokens of one trajectory, prompt and observations included")
    max_observation_tokens: int = Field(64, ge=1, description="tokens of one observation; longer ones are cut")
    hop_weights: dict[int, float] | None = Field(
        None, description="share of each number of hops among training questions; None: as they come"
    )


class Reward(Section):
    name: Literal["exact_match", "f1"] = "exact_match"


# ------------------------------------------------------------------------------------------------------------ method
class Chains(Section):
    """Independent full trajectories (the rollouts of GRPO and its relatives)."""

    name: Literal["chains"]
    chains: int = Field(8, ge=1)
    merge_siblings: bool = Field(False, description="merge identical turns; off, so that each chain is one sequence")

    @property
    def leaves(self) -> int:
        return self.chains


class InitializeThenExpand(Section):
    """A few full trajectories, then forks from their intermediate turns (ALGORITHMS.md §1.1)."""

    name: Literal["initialize_then_expand"]
    trunks: int = Field(4, ge=1)
    forks: int = Field(2, ge=0, description="forks of each trunk")
    fork_fallback: Literal["root", "none"] = Field("root", description="where a one-turn trunk is forked")
    merge_siblings: bool = True

    @property
    def leaves(self) -> int:
        return self.trunks * (1 + self.forks)


class Demonstrations(Section):
    """Scripted trajectories instead of sampled ones: supervised learning on the same rails."""

    name: Literal["demonstrations"]
    noise: float = Field(1.0, ge=0, le=1, description="how often the scripted agent may err")
    correct_hop: float = Field(0.42, ge=0, le=1, description="probability of a well-formed query when it may err")
    retry: float = Field(0.5, ge=0, le=1, description="probability of noticing a failed hop and trying again")
    early_stop: float = Field(0.08, ge=0, le=1, description="probability of answering before the last hop")
    symbol_shuffle: float = Field(0.5, ge=0, le=1, description="share of demonstrations with permuted content words")
    curriculum: float = Field(
        0.3, ge=0, le=0.5, description="share of the run each for clean 1-hop and clean 1/2-hop demonstrations"
    )

    @property
    def leaves(self) -> int:
        return 1


Expansion = Annotated[Chains | InitializeThenExpand | Demonstrations, Field(discriminator="name")]


class Outcome(Section):
    """One number per trajectory, given to each of its turns (ALGORITHMS.md §3)."""

    name: Literal["outcome"]
    baseline: Literal["mean_std", "mean", "leave_one_out", "none"] = Field(
        "mean_std", description="GRPO, Dr. GRPO, RLOO; none: the reward itself"
    )


class TreeBackup(Section):
    """Leaf advantages backed up along the tree (ALGORITHMS.md §1.2)."""

    name: Literal["tree_backup"]
    backup: Literal["likelihood", "uniform", "surprisal", "leaves"] = "likelihood"
    mode: Literal["pointwise", "listwise"] = "pointwise"


Credit = Annotated[Outcome | TreeBackup, Field(discriminator="name")]


class BernoulliKL(Section):
    """TreeOPSD: forward KL from a bounded Bernoulli target to the turn ratio (ALGORITHMS.md §1.3)."""

    name: Literal["bernoulli_kl"]
    teacher: Literal["affine_prob", "affine_odds", "logistic"] = "affine_prob"
    ratio: Literal["sum", "mean", "sqrt"] = "sum"
    radius: float = Field(0.1, gt=0, lt=0.5, description="delta: largest distance of the target from 1/2")
    kappa: Literal["sqrt_leaves", "max"] | Annotated[float, Field(gt=0)] = Field(
        "sqrt_leaves",
        description="credit that reaches the full radius: sqrt(leaves-1), the question's largest, a number",
    )
    one_sided: Literal["none", "negative", "both"] = Field(
        "none", description="deviation from the method: no reversal for turns of negative credit, or for all"
    )
    mixture_weight: bool = Field(False, description="weight (2+ru)/2 of affine_odds, which makes the gradient exact")
    scale: Literal["policy_gradient", "one"] = Field(
        "policy_gradient", description="policy_gradient: kappa/delta, so that the first step equals TreePO's"
    )
    max_log_ratio: float = Field(5.0, gt=0, description="turns with a larger |log ratio| are dropped and counted")

    @model_validator(mode="after")
    def _odds_stay_positive(self) -> BernoulliKL:
        if self.teacher == "affine_odds" and self.radius >= 0.25:
            raise ValueError("radius must be below 0.25 with teacher=affine_odds: the target ratio 1 + 4*radius*u "
                             "must stay positive")  # fmt: skip
        if self.mixture_weight and self.teacher != "affine_odds":
            raise ValueError("mixture_weight=true belongs to teacher=affine_odds only")
        return self


class Clipped(Section):
    """Clipped policy gradient: PPO, GRPO, GSPO, DAPO, TreePO (ALGORITHMS.md §2 and §3)."""

    name: Literal["clipped"]
    ratio: Literal["token", "turn", "turn_sum", "sequence"] = Field(
        "token", description="turn: geometric mean of the turn; turn_sum: its product; sequence: GSPO"
    )
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)
    clip: bool = Field(True, description="false: unclipped policy gradient with the same ratio")
    dual_clip: float | None = Field(None, gt=1, description="bound on the loss of negative credit, usually 3")


class Likelihood(Section):
    """Negative log-likelihood of the sampled tokens (supervised learning)."""

    name: Literal["likelihood"]


Objective = Annotated[BernoulliKL | Clipped | Likelihood, Field(discriminator="name")]


class Update(Section):
    """How one rollout batch becomes optimizer steps."""

    questions_per_step: int = Field(16, ge=1)
    epochs: int = Field(2, ge=1)
    mini_batches: int = Field(2, ge=1, description="optimizer steps an epoch; each turn is trained once an epoch")
    aggregation: Literal["turn_mean", "token_mean", "sequence_mean"] = "turn_mean"
    turn_weight: Literal["multiplicity", "leaves", "one"] = Field(
        "multiplicity", description="omega of ALGORITHMS.md §1.3: draws of the turn, leaves below it, or one"
    )
    drop_zero_variance: bool = Field(True, description="leave out questions whose leaves all got the same reward")


class Optimizer(Section):
    lr: float = Field(3e-4, gt=0)
    min_lr: float = Field(0.0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0, description="optimizer steps")
    weight_decay: float = Field(0.0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.98, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, gt=0)
    muon_lr: float | None = Field(None, gt=0, description="train q, k, v and o projections with Muon at this rate")


class Rollout(Section):
    temperature: float = Field(1.0, gt=0)


class Mismatch(Section):
    """What is done where the engine's log-probabilities differ from the trainer's."""

    routes: Literal["ignore", "compare", "replay"] = Field(
        "ignore",
        description="experts of each token in the engine. compare: count where the trainer's differ; replay: use them",
    )
    truncate: Literal["none", "token", "turn"] = Field(
        "none",
        description="weigh each turn, or the gradient of each token, with min(ratio, cap), ratio: its probability, "
        "trainer over engine",
    )
    cap: float = Field(2.0, gt=0, description="largest importance weight")
    drop_above: float | None = Field(None, gt=0, description="drop turns whose |log ratio| is larger, and count them")
    alarm_rise: float = Field(3.0, ge=0, description="warn if the mean difference grew by this factor; 0: never")
    alarm_window: int = Field(10, ge=1, description="steps at the start and at the end that are compared")
    alarm_floor: float = Field(1e-3, ge=0, description="nats a token below which growth is no concern")


# ----------------------------------------------------------------------------------------------------------- cluster
class EmbeddedEngine(Section):
    """The policy inside the training process, for machines without a GPU."""

    name: Literal["embedded"] = "embedded"
    max_batch: int = Field(192, ge=1, description="requests decoded together")
    cache_tokens: int = Field(262_144, ge=256, description="capacity of the prefix cache")
    verify_every: int = Field(0, ge=0, description="publishes between checks against the trainer; 0: never")
    verify_tolerance: float = Field(1e-3, gt=0, description="nats a token's log-probability may differ in that check")

    @property
    def ranks_per_engine(self) -> int:
        """Each training process has its own."""
        return 1


class SGLangEngine(Section):
    """SGLang in a process of its own beside the training processes."""

    name: Literal["sglang"]
    python: Path = Field(
        Path(".venv-sglang/bin/python"), description="interpreter of SGLang's environment (./launch/sglang_env.sh)"
    )
    ranks_per_engine: int = Field(1, ge=1, description="training processes that share one engine")
    tensor_parallel: int = Field(
        0, ge=0, description="devices that one engine is divided over; 0: ranks_per_engine GPUs, or one CPU"
    )
    first_gpu: int | None = Field(
        None, ge=0, description="first GPU of the engines, behind those of the training; None: on the same GPUs"
    )
    max_batch: int = Field(64, ge=1, description="requests in the engine at a time")
    cache_tokens: int = Field(65_536, ge=256, description="capacity of the cache of keys and values")
    deterministic: bool = Field(True, description="a seed gives the same tokens in any batch")
    bucket_mb: int = Field(256, ge=1, description="MiB of weights handed over at a time")
    transport: Literal["auto", "shared_memory", "cuda_ipc", "distributed", "disk"] = Field(
        "auto", description="how weights get there; auto: cuda_ipc, distributed with first_gpu, shared_memory on a CPU"
    )
    verify_every: int = Field(1, ge=0, description="publishes between checks against the trainer; 0: never")
    verify_tolerance: float = Field(1e-3, gt=0, description="nats a token's log-probability may differ in that check")
    restarts: int = Field(1, ge=0, description="how often a dead engine is started again between two publishes")
    start_seconds: float = Field(600, gt=0, description="longest wait for the engine to start")
    request_seconds: float = Field(600, gt=0, description="longest wait for an answer of the engine")
    port: int = Field(0, ge=0, le=65535, description="loopback port of SGLang's process group; 0: any that is free")
    memory_fraction: float = Field(0.5, gt=0, lt=1, description="share of a GPU's memory for weights and cache")
    sleep_tags: tuple[Literal["kv_cache", "weights", "cuda_graph"], ...] = Field(
        ("kv_cache", "weights"), description="memory that is given back while training runs; empty: the engine stays up"
    )


Engine = Annotated[EmbeddedEngine | SGLangEngine, Field(discriminator="name")]


class Layout(Section):
    """Parallel layout of training."""

    tp: int = Field(1, ge=1, description="tensor parallel; sequence parallel is on whenever it is above 1")
    pp: int = Field(1, ge=1, description="pipeline parallel")
    cp: int = Field(1, ge=1, description="context parallel: ranks that share the rows of one micro-batch")
    ep: int = Field(1, ge=1, description="expert parallel")
    etp: int = Field(1, ge=1, description="tensor parallel inside an expert")
    distributed_optimizer: bool = False
    spec: Literal["auto", "local", "transformer_engine"] = "auto"
    threads: int = Field(1, ge=1, description="CPU threads of one process")
    timeout_seconds: float = Field(600, gt=0, description="longest wait in one collective before the run is ended")


class Packing(Section):
    micro_batch_tokens: int = Field(8192, ge=16, description="unique tokens of one micro-batch")


class Checkpointing(Section):
    every_steps: int = Field(0, ge=0, description="0: only at the end")
    keep: int = Field(2, ge=1)


class Evaluation(Section):
    every_steps: int = Field(0, ge=0, description="0: only before and after training")
    split: Literal["dev", "test"] = "test"
    questions: int = Field(256, ge=0)
    sampled_repeats: int = Field(1, ge=0, description="sampled passes beside the greedy one")


class Logging(Section):
    trees_every_steps: int = Field(10, ge=0, description="steps between saved rollout trees; 0: only the last step")
    report: bool = True


# ------------------------------------------------------------------------------------------------------------ recipe
class Recipe(Section):
    """Everything a run needs. `run` is the folder it writes to."""

    method: str = Field("custom", description="name of the method's recipe; only reported, never acted on")
    seed: int = Field(1, ge=0)
    run: Path = Field(Path("runs/run"), description="run folder; by default runs/TASK-METHOD-SEED")
    resume: bool = Field(False, description="continue the run folder from its last checkpoint")
    steps: int | None = Field(None, ge=0, description="rollout batches; None: until the budget is spent")
    budget: float | None = Field(None, gt=0, description="training wall clock in seconds, evaluation not counted")
    model: Model
    task: Task
    reward: Reward = Reward()
    expansion: Expansion
    credit: Credit
    objective: Objective
    update: Update = Update()
    optimizer: Optimizer = Optimizer()
    rollout: Rollout = Rollout()
    mismatch: Mismatch = Mismatch()
    engine: Engine = EmbeddedEngine()
    layout: Layout = Layout()
    packing: Packing = Packing()
    checkpoint: Checkpointing = Checkpointing()
    evaluation: Evaluation = Evaluation()
    logging: Logging = Logging()

    @property
    def optimizer_steps(self) -> int | None:
        """Optimizer steps of the whole run, at most; None if only a budget ends it."""
        return None if self.steps is None else self.steps * self.update.epochs * self.update.mini_batches

    @model_validator(mode="after")
    def _ends(self) -> Recipe:
        if self.steps is None and self.budget is None:
            raise ValueError("a run needs an end: set steps=N or budget=SECONDS")
        if self.steps is None and self.optimizer.schedule != "constant":
            raise ValueError(f"optimizer.schedule={self.optimizer.schedule} needs to know its end: set steps=N")
        if self.update.mini_batches > self.update.questions_per_step:
            raise ValueError(
                f"update.mini_batches={self.update.mini_batches} is more than "
                f"update.questions_per_step={self.update.questions_per_step}: some mini-batches would be empty"
            )
        if self.engine.name == "sglang" and self.engine.cache_tokens < self.task.max_context_tokens:
            raise ValueError(
                f"engine.cache_tokens={self.engine.cache_tokens} cannot hold one trajectory of "
                f"task.max_context_tokens={self.task.max_context_tokens}"
            )
        return self
