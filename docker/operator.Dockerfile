# The operator. Carries neither torch nor the engine.
#
#   docker build -f docker/operator.Dockerfile -t decodefleet-operator .
#
# BASE  a Debian image with Python 3.11 or newer
ARG BASE=python:3.11-slim
FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/decodefleet
WORKDIR /src
# The dependencies are a layer of their own, so that a changed source file does not install them again.
COPY pyproject.toml constraints.txt ./
RUN python3 -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb')); print(*p['project']['dependencies'], *p['project']['optional-dependencies']['operator'], sep='\n')" > requirements.txt \
    && /opt/decodefleet/bin/pip install -r requirements.txt -c constraints.txt
COPY README.md ./
COPY proto proto
COPY operator operator
COPY node_agent node_agent
RUN /opt/decodefleet/bin/pip install --no-deps . \
    && rm -rf /opt/decodefleet/lib/python3*/site-packages/decodefleet_agent \
    && /opt/decodefleet/bin/pip uninstall -y setuptools pip

FROM ${BASE}
COPY --from=build /opt/decodefleet /opt/decodefleet
ENV PATH=/opt/decodefleet/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 65532:65532
EXPOSE 8081
ENTRYPOINT ["decodefleet", "operator"]
