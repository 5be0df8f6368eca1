# syntax=docker/dockerfile:1
# The image of every task: one for CPU and GPU nodes. torch brings its CUDA libraries; the node brings the driver.
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG UV_VERSION=0.13.9
RUN python -m pip install --no-cache-dir uv==${UV_VERSION} && python -m venv /opt/strata
WORKDIR /src
COPY requirements.lock ./
RUN uv pip install --no-cache --python /opt/strata --require-hashes -r requirements.lock
COPY kernels kernels
COPY platform platform
# The build back end is for this stage alone; it stays out of the image.
RUN uv pip install --no-cache --python /opt/strata --no-deps ./kernels ./platform

FROM ${PYTHON_IMAGE}
# Triton builds its launchers at run time: a C compiler, its headers and Python's (in the base image). Flyte's fast
# registration unpacks code with tar. tini, as process 1, passes SIGTERM on.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev tar tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home strata \
    && install --directory --owner strata --group strata /app /var/cache/strata/triton /var/cache/strata/huggingface
COPY --from=build /opt/strata /opt/strata
ENV PATH=/opt/strata/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    # One absolute path everywhere: Triton's cache entries hold absolute paths.
    TRITON_CACHE_DIR=/var/cache/strata/triton \
    HF_HOME=/var/cache/strata/huggingface
WORKDIR /app
COPY --chown=strata:strata tasks tasks
COPY --chown=strata:strata workflows workflows
USER strata
# Flyte sets the arguments and leaves the entry point.
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["python", "-m", "tasks.runtime", "--help"]
