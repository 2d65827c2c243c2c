# Images of the project: `gpu` for production, `cpu` for trying it out.
#
#   docker build --target cpu -t treeopsd:cpu .
#   docker build --target gpu -t treeopsd:gpu --build-arg NVIDIA_PYTORCH=IMAGE .
#
# IMAGE is a release of NVIDIA's PyTorch container with CUDA 13 and Python 3.12; its compilers, CUDA and NCCL are used.
# The tests do not build these images (they run where no container engine is), and neither was built when this was
# written: expect to adjust a version the first time.
ARG NVIDIA_PYTORCH

# ------------------------------------------------------------------------------------------------------------- cpu
FROM python:3.11-slim AS cpu

RUN apt-get update \
    && apt-get install --yes --no-install-recommends util-linux \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/treeopsd
COPY . .
# A place that has a CPU build of torch, for instance "--extra-index-url URL".
ARG TREEOPSD_PIP_ARGS=""
RUN launch/env.sh cpu
ENV PATH=/opt/treeopsd/.venv/bin:$PATH \
    TREEOPSD_INSTALL=0
ENTRYPOINT ["treeopsd"]

# ------------------------------------------------------------------------------------------------------------- gpu
FROM ${NVIDIA_PYTORCH} AS gpu

# An environment of its own: the container's torch is another version than the one that megatron-core is pinned with.
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PIP_CONSTRAINT="" \
    PIP_NO_CACHE_DIR=1 \
    TREEOPSD_INSTALL=0
WORKDIR /opt/treeopsd
COPY setup.py constraints.txt README.md pyproject.toml ./

# torch first and alone, so that nothing later replaces it.
RUN pip install --constraint constraints.txt torch \
    && pip install --constraint constraints.txt setuptools wheel ninja packaging pybind11

# apex, for gradient_accumulation_fusion. The package of that name on the package index is something else. Pin APEX_REF
# to a commit for an image that can be built again.
ARG APEX_REF=master
RUN git clone https://github.com/NVIDIA/apex.git /opt/apex \
    && git -C /opt/apex checkout ${APEX_REF} \
    && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation --no-deps /opt/apex

# Transformer Engine compiles against the torch that is there, hence without build isolation; DALI comes with the extra.
COPY megatron_treeopsd megatron_treeopsd
COPY launch launch
RUN pip install --no-build-isolation --constraint constraints.txt --editable ".[gpu]"

# The serving engine is another process and pins another torch: an environment beside ours.
RUN python3 -m venv /opt/sglang \
    && /opt/sglang/bin/pip install --editable ".[sglang]"

COPY . .
RUN python -c "import apex, megatron.core, transformer_engine.pytorch"
ENTRYPOINT ["treeopsd"]
