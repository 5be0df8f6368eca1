# syntax=docker/dockerfile:1
# Two images:
#
#     docker build --tag strata:0.1.0 .
#     docker build --tag strata-platform:0.1.0 --target platform .
#
# The first runs every task, on CPU and GPU nodes: torch brings its CUDA libraries, the node brings the driver. The kernels
# of MODELS are in it, compiled for ARCHS, and the packages of EXTRAS. The second is small: the `strata` command alone, without torch.
#
# The base is pinned to a tag of whole versions. To have the very bytes of a build again, give its digest:
# --build-arg PYTHON_IMAGE=python@sha256:...
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm

# What both are made from: tini, as process 1, passes SIGTERM on.
FROM ${PYTHON_IMAGE} AS base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home strata
ENV PATH=/opt/strata/bin:$PATH \
    PYTHONUNBUFFERED=1
# Flyte sets the arguments and leaves the entry point.
ENTRYPOINT ["/usr/bin/tini", "--"]

# Packages are installed in stages that stay behind, with their build back end. Compiled here, they are not compiled again
# by every process of a user who may not write there.
FROM ${PYTHON_IMAGE} AS installer
ARG UV_VERSION=0.13.9
ENV UV_COMPILE_BYTECODE=1
RUN python -m pip install --no-cache-dir uv==${UV_VERSION} && python -m venv /opt/strata
WORKDIR /src

FROM installer AS platform-packages
COPY images/platform.lock ./
RUN uv pip install --no-cache --python /opt/strata --require-hashes -r platform.lock
COPY platform platform
RUN uv pip install --no-cache --python /opt/strata --no-deps ./platform

FROM base AS platform
COPY --from=platform-packages /opt/strata /opt/strata
USER strata
WORKDIR /home/strata
CMD ["strata", "--help"]

FROM installer AS packages
COPY requirements.lock ./
RUN uv pip install --no-cache --python /opt/strata --require-hashes -r requirements.lock
# Of pyproject.toml, divided by commas: deepspeed,wandb.
ARG EXTRAS=
COPY pyproject.toml images/extras.py images/extras.lock ./
RUN test -z "${EXTRAS}" || { python extras.py "${EXTRAS}" > extras.txt \
    && uv pip install --no-cache --python /opt/strata --require-hashes -c extras.lock -r extras.txt; }
COPY kernels kernels
COPY platform platform
RUN uv pip install --no-cache --python /opt/strata --no-deps ./kernels ./platform

# Triton builds what was not baked at run time: a C compiler, its headers and Python's (in the base image); torch.compile
# takes a C++ compiler for what runs on the CPU. Flyte's fast registration unpacks code with tar.
FROM base AS runtime
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libc6-dev tar \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner strata --group strata /app /var/cache/strata/triton /var/cache/strata/huggingface
COPY --from=packages /opt/strata /opt/strata
# The folder of the driver's library is part of what Triton's helper is found by, and differs between nodes: this one does
# not. In it is a library to link to, with the names of the driver's functions; when a program runs, the node's is used.
ENV TRITON_LIBCUDA_PATH=/opt/libcuda \
    STRATA_BAKED_KERNELS=/opt/kernels \
    # One absolute path everywhere: Triton's cache entries hold absolute paths.
    TRITON_CACHE_DIR=/var/cache/strata/triton \
    HF_HOME=/var/cache/strata/huggingface

# No GPU is needed, nor a driver.
FROM runtime AS kernels
ARG MODELS=llama-3.1-8b,qwen3-4b
ARG ARCHS=sm_90,sm_100
RUN python -m strata_kernels bake --model ${MODELS} --arch ${ARCHS} --out /opt/kernels

FROM runtime AS training
COPY --from=kernels /opt/libcuda /opt/libcuda
COPY --from=kernels /opt/kernels /opt/kernels
WORKDIR /app
COPY --chown=strata:strata tasks tasks
COPY --chown=strata:strata workflows workflows
# Otherwise every new pod compiles them when it first imports them. Bytecode is compared with its source by content: a working
# copy, unpacked over these files, has other times than they had.
RUN python -m compileall -q --invalidation-mode checked-hash tasks workflows
USER strata
CMD ["python", "-m", "tasks.runtime", "--help"]
