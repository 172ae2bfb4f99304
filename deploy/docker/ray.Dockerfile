# Everything: orchestrator, scorers and trainer (Ray, DeepSpeed) and vLLM for the CPU. `nightshift run` and `nightshift up`
# with embedded services run from it, Ray nodes too.
#   docker build -f deploy/docker/ray.Dockerfile -t nightshift/ray:0.1.0 .
# CUDA: --build-arg PYTHON_IMAGE=<image with Python 3.12 and CUDA> --build-arg LOCKS=gpu.txt
ARG PYTHON_IMAGE=docker.io/library/python:3.11.14-slim-bookworm

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS build
ARG PIP_CERT
ARG PIP_INDEX_URL
# The index with the CPU build of torch, where the usual one has the CUDA build alone.
ARG PIP_EXTRA_INDEX_URL
ARG LOCKS="cpu.txt cpu-hashed.txt"
# Operators that are compiled here, since a read-only root has neither a compiler nor a place for what it makes. Without
# the first one DeepSpeed would compile it at the start of every trainer.
ARG DS_OPS="DS_BUILD_SHM_COMM=1 DS_BUILD_CPU_ADAM=1"
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY requirements /src/requirements
WORKDIR /src/requirements
# The lock holds DeepSpeed's version; it is built from source for its operators.
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --no-deps "$(grep -m1 -E '^setuptools==' cpu.txt || echo 'setuptools>=77')" wheel==0.45.1 \
    && for lock in ${LOCKS}; do grep -vE '^deepspeed==' "${lock}" > "/tmp/${lock}" \
         && /opt/venv/bin/pip install --no-cache-dir --no-deps -r "/tmp/${lock}" || exit 1; done \
    && PATH="/opt/venv/bin:${PATH}" env ${DS_OPS} /opt/venv/bin/pip install --no-cache-dir --no-deps --no-build-isolation \
         --no-binary deepspeed "$(grep -hE '^deepspeed==' ${LOCKS})" \
    && find /opt/venv -name __pycache__ -prune -exec rm -rf {} +

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="nightshift with Ray, DeepSpeed and vLLM" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 libnuma1 procps \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 nightshift \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin nightshift \
    && install -d -o 10001 -g 10001 /data
# KubeRay starts Ray in a login shell, whose profile sets the path anew.
COPY deploy/docker/profile.sh /etc/profile.d/nightshift.sh
COPY --from=build /opt/venv /opt/venv
COPY nightshift /opt/nightshift/nightshift
COPY orchestrator /opt/nightshift/orchestrator
COPY services /opt/nightshift/services
COPY examples /opt/nightshift/examples
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONPATH=/opt/nightshift \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    NIGHTSHIFT_LOG_FORMAT=json \
    RAY_USAGE_STATS_ENABLED=0 \
    HF_HUB_OFFLINE=1 \
    HOME=/tmp
USER 10001:10001
WORKDIR /data
EXPOSE 8700
# The API where it is served; a container that runs one job, or a Ray node, has its own check in compose or the chart.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=6 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8700/healthz', timeout=4)"]
ENTRYPOINT ["python", "-m", "nightshift.cli.main"]
CMD ["up", "--host", "0.0.0.0", "--port", "8700", "--data-dir", "/data", "--drain-seconds", "300"]
