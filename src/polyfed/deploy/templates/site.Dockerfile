# A site (a SuperNode), from the wheel of polyfed. In this folder:
#   pip wheel --no-deps -w . /path/to/polyfed          # or pip download --no-deps polyfed: the same version as the server
#   docker build -f site.Dockerfile -t polyfed-site:0.1.0 .
# With a GPU: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126, and compose.yaml gives the GPU to the container.
# No data, network or key is in the image: site.py, its data and the key are mounted (compose.yaml).
FROM python:3.12.11-slim-bookworm AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY polyfed-*.whl /wheel/
RUN python -m venv /opt/polyfed \
 && /opt/polyfed/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.13.0 \
 && set -- /wheel/polyfed-*.whl \
 && /opt/polyfed/bin/pip install --no-cache-dir "polyfed[flower] @ file://$1" torch==2.13.0

FROM python:3.12.11-slim-bookworm
RUN groupadd --gid 10001 polyfed \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/polyfed --shell /usr/sbin/nologin polyfed \
 && install -d -o 10001 -g 10001 -m 0700 /var/lib/polyfed \
 && install -d -m 0755 /etc/polyfed
COPY --from=build /opt/polyfed /opt/polyfed
ENV PATH=/opt/polyfed/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/var/lib/polyfed \
    FLWR_HOME=/var/lib/polyfed/supernode \
    FLWR_TELEMETRY_ENABLED=0 \
    FLWR_DISABLE_UPDATE_CHECK=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/polyfed
VOLUME ["/etc/polyfed", "/var/lib/polyfed"]
STOPSIGNAL SIGTERM
# Whether the site reaches the server, by what its SuperNode records in the folder for states.
HEALTHCHECK --interval=60s --timeout=20s --start-period=90s --retries=3 \
  CMD ["polyfed", "flower", "health", "/var/lib/polyfed/state"]
# After these the container is given --superlink HOST:PORT and --node-config '...' (compose.yaml).
ENTRYPOINT ["python", "-P", "-m", "polyfed.deploy.supernode", "--root-certificates", "/etc/polyfed/ca.crt", \
  "--auth-supernode-private-key", "/etc/polyfed/site.key"]
