# The control plane alone: API, runner, command line. No torch, no Ray, no vLLM.
#   docker build -f deploy/docker/orchestrator.Dockerfile -t nightshift/orchestrator:0.1.0 .
ARG PYTHON_IMAGE=docker.io/library/python:3.11.14-slim-bookworm

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS build
# For a package index behind a certificate of one's own; not in the final image.
ARG PIP_CERT
ARG PIP_INDEX_URL
COPY requirements/orchestrator.txt /src/requirements/
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --no-deps -r /src/requirements/orchestrator.txt

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="nightshift orchestrator" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
RUN groupadd --gid 10001 nightshift \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin nightshift \
    && install -d -o 10001 -g 10001 /data
COPY --from=build /opt/venv /opt/venv
COPY nightshift /opt/nightshift/nightshift
COPY orchestrator /opt/nightshift/orchestrator
COPY services /opt/nightshift/services
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONPATH=/opt/nightshift \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    NIGHTSHIFT_LOG_FORMAT=json \
    HOME=/tmp
USER 10001:10001
WORKDIR /data
EXPOSE 8700
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=6 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8700/healthz', timeout=4)"]
ENTRYPOINT ["python", "-m", "nightshift.cli.main"]
CMD ["up", "--host", "0.0.0.0", "--port", "8700", "--data-dir", "/data", "--drain-seconds", "300"]
