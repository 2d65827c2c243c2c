"""The other arm of step.py: trl's GRPOTrainer on the same policy, prompts, group size and token limit.

A process of its own: `python step_trl.py JOB.json`. It loads everything, prints {"ready": ...}, and takes one rollout
step (generation and all its optimizer steps) for every line that it reads; see step.py for the exchange. It knows
nothing of our package, so it may run under another Python.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def main(job_file: Path) -> None:
    job = json.loads(job_file.read_text())
    torch.set_num_threads(1)
    torch.manual_seed(job["seed"])
    tokenizer = AutoTokenizer.from_pretrained(job["checkpoint"], local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        job["checkpoint"],
        local_files_only=True,
        dtype=torch.float32,
        attn_implementation=job["attention"],
        experts_implementation=job["experts"],
    )
    # Turns end at the same tokens in both arms. trl reads them from the model before it sets its own defaults.
    model.generation_config.eos_token_id = job["stop_ids"]
    prompts = [[{"role": "user", "content": text}] for text in job["questions"]]
    check_prompts(tokenizer, prompts, job["prompt_ids"])
    meter = Meter(optimizer_steps=job["epochs"] * job["mini_batches"])
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=meter.reward,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        args=configuration(job),
        callbacks=[meter],
    )
    trainer.train()


def check_prompts(tokenizer: Any, prompts: list[list[dict[str, str]]], expected: list[list[int]]) -> None:
    """Both arms must read the same tokens, or the comparison means nothing."""
    found = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)["input_ids"]
    if found != expected:
        raise SystemExit("step_trl.py: trl's prompts are not the tokens of our environment's prompts")


def configuration(job: dict[str, Any]) -> GRPOConfig:
    rollouts = job["questions_per_step"] * job["chains"]
    return GRPOConfig(
        output_dir=job["scratch"],
        use_cpu=True,
        bf16=False,
        seed=job["seed"],
        # One generation serves `mini_batches` x `epochs` optimizer steps.
        per_device_train_batch_size=rollouts // job["mini_batches"],
        gradient_accumulation_steps=1,
        steps_per_generation=job["mini_batches"],
        num_iterations=job["epochs"],
        max_steps=job["rounds"] * job["epochs"] * job["mini_batches"],
        num_generations=job["chains"],
        max_completion_length=job["max_new_tokens"],
        temperature=1.0,
        top_k=0,
        shuffle_dataset=False,
        loss_type="grpo",
        beta=0.0,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        router_aux_loss_coef=0.0,
        optim="adamw_torch",
        # Whatever costs time and is not the step itself is off; so is what trades time for memory.
        activation_checkpointing=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


class Meter(TrainerCallback):
    """Takes rollout steps when told to, and counts their tokens and seconds."""

    def __init__(self, *, optimizer_steps: int) -> None:
        self._optimizer_steps = optimizer_steps
        self._generated = 0

    def reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """A reward that costs nothing and differs within a group, so that every completion is trained on."""
        self._generated += sum(map(len, completion_ids))
        return [float(ids[-1] % 2) for ids in completion_ids]

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._optimizer_steps == 0:
            if state.global_step == 0:
                send({"ready": True, "versions": {"trl": version("trl"), "transformers": version("transformers")}})
            sys.stdin.readline()
            self._generated = 0
            self._cpu, self._wall = time.process_time(), time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._optimizer_steps == 0:
            send(
                {
                    "cpu_seconds": time.process_time() - self._cpu,
                    "wall_seconds": time.perf_counter() - self._wall,
                    "generated_tokens": self._generated,
                }
            )


def send(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
