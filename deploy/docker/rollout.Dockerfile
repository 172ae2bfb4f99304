# vLLM's own image with our guard, rollout route and weight engine inside its process.
#   docker build -f deploy/docker/rollout.Dockerfile -t nightshift/rollout:0.1.0 .
# Any vLLM from 0.26 to 0.33: --build-arg VLLM_IMAGE=docker.io/vllm/vllm-openai:v0.33.0
ARG VLLM_IMAGE=docker.io/vllm/vllm-openai:v0.32.0

# hadolint ignore=DL3006
FROM ${VLLM_IMAGE}
ARG PIP_CERT
ARG PIP_INDEX_URL
LABEL org.opencontainers.image.title="nightshift rollout server" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
COPY requirements/rollout.txt /opt/nightshift/requirements/
# Beside the image's own packages: what vLLM has is left as it is.
RUN python3 -m pip install --no-cache-dir --no-deps --target /opt/nightshift/lib -r /opt/nightshift/requirements/rollout.txt \
    && groupadd --gid 10001 nightshift \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin nightshift
COPY nightshift /opt/nightshift/nightshift
COPY services/__init__.py /opt/nightshift/services/
COPY services/rollout /opt/nightshift/services/rollout
ENV PYTHONPATH=/opt/nightshift/services/rollout/site:/opt/nightshift:/opt/nightshift/lib \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    VLLM_SERVER_DEV_MODE=1 \
    VLLM_NO_USAGE_STATS=1 \
    DO_NOT_TRACK=1 \
    HF_HUB_OFFLINE=1 \
    HOME=/tmp
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=10s --start-period=30m --retries=6 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=8)"]
ENTRYPOINT ["python3", "-m", "vllm.entrypoints.openai.api_server"]
