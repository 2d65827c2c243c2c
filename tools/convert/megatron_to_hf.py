"""Megatron torch_dist -> Hugging Face folder. The same as `treeopsd convert to-hf`; see --help."""

import sys

from megatron_treeopsd.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-hf", *sys.argv[1:]]))
