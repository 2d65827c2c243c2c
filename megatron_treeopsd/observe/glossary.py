"""What the metrics mean, in the words of the report: title, explanation and unit of each tag."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_treeopsd.observe.charts import COUNT, NUMBER, SHARE, Unit


@dataclass(frozen=True, slots=True)
class Term:
    """How a tag is shown to people."""

    title: str
    meaning: str
    unit: Unit = NUMBER


_TERMS = {
    "rollout/turns_mean": Term("turns", "mean number of turns of a trajectory"),
    "rollout/no_answer_share": Term("no answer", "trajectories that ended without an answer", SHARE),
    "rollout/zero_variance_share": Term("nothing to learn", "questions whose leaves all got the same reward", SHARE),
    "rollout/generated_tokens": Term("sampled", "tokens sampled by the policy", COUNT),
    "rollout/cached_tokens": Term("prompt, cached", "prompt tokens found in the prefix cache", COUNT),
    "rollout/computed_prompt_tokens": Term("prompt, computed", "prompt tokens computed by the engine", COUNT),
    "rollout/tokens_per_second": Term("sampled tokens a second", "sampled tokens over the time of rollout", COUNT),
    "engine/sleep_seconds": Term("engine goes to sleep", "seconds in which it gives memory back to training"),
    "engine/wake_seconds": Term("engine wakes", "seconds in which it takes its memory again, weights not counted"),
    "engine/freed_bytes": Term(
        "freed by sleep", "bytes that the engines gave back on the devices of their leaders", COUNT
    ),
    "train/loss": Term("loss", "mean over the mini-batches of a step"),
    "train/grad_norm": Term("gradient norm", "before clipping"),
    "train/lr": Term("learning rate", "at the last mini-batch of a step"),
    "train/trained_tokens": Term("trained", "unique sampled tokens in the update", COUNT),
    "train/unique_tokens": Term(
        "unique", "unique tokens of the trained trees, prompts and observations included", COUNT
    ),
    "objective/progress_median": Term(
        "progress to target",
        "log-ratio of a turn over that of its target, median: 0 not moved, 1 there, above 1 beyond",
    ),
    "objective/reversed_share": Term("reversed", "turns beyond their target, which are pulled back", SHARE),
    "objective/reversed_negative_weight_share": Term(
        "reversed, negative credit", "share of the gradient weight that lifts turns of negative credit", SHARE
    ),
    "objective/near_target_share": Term("near the target", "turns within a tenth of the way to their target", SHARE),
    "objective/wrong_direction_share": Term("wrong way", "turns that moved against their credit", SHARE),
    "objective/clipped_share": Term(
        "clipped", "terms without gradient because their ratio is outside the range", SHARE
    ),
    "objective/log_ratio_abs_median": Term("how far turns moved", "absolute log-ratio to the sampling policy, median"),
    "objective/log_ratio_abs_p95": Term("how far the fastest moved", "absolute log-ratio, 95th percentile"),
    "objective/kl_behaviour": Term("KL to the sampling policy", "estimate over the trained tokens, in nats a token"),
    "objective/dropped_turns": Term("dropped turns", "turns left out because their log-ratio was too large", COUNT),
    "objective/nll": Term("negative log-likelihood", "nats a token"),
    "objective/loss": Term("objective", "sum over turns of weight times loss"),
    "mismatch/logprob_abs_mean": Term("engine against trainer", "mean absolute difference of log-probs, nats a token"),
    "mismatch/logprob_abs_max": Term("engine against trainer, worst", "largest absolute difference, nats a token"),
    "mismatch/trend": Term("engine against trainer, trend", "mean difference over that of the first steps"),
    "mismatch/truncated_turns": Term("truncated turns", "turns whose importance weight was cut to the cap", COUNT),
    "mismatch/truncated_tokens": Term("truncated tokens", "tokens whose importance weight was cut to the cap", COUNT),
    "mismatch/routes_differ_share": Term(
        "routes that differ",
        "pairs of token and layer where the trainer's router chooses other experts than the engine's",
    ),
    "mismatch/routes_replayed_share": Term(
        "routes of the engine", "pairs of token and layer that the trainer computes with the engine's experts"
    ),
    "mismatch/dropped_turns": Term("mismatched turns", "turns dropped because engine and trainer disagree", COUNT),
    "mismatch/turn_ratio_error_max": Term("engine against trainer, turns", "largest error of a turn's ratio"),
}


def term(tag: str) -> Term:
    """The term of a tag; its own name where the glossary has none, as a share if it is called one."""
    if found := _TERMS.get(tag):
        return found
    name = tag.rpartition("/")[2]
    return Term(name.replace("_", " "), "", SHARE if name.endswith("_share") else NUMBER)
