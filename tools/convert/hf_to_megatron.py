"""Hugging Face folder -> Megatron torch_dist. The same as `treeopsd convert to-megatron`; see --help."""

import sys

from megatron_treeopsd.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-megatron", *sys.argv[1:]]))
