# The operator. Carries neither torch nor the engine.
#
#   docker build -f docker/operator.Dockerfile -t decodefleet-operator .
#
# BASE  a Debian image with Python 3.11 or newer
ARG BASE=python:3.11-slim
# The requirements are a stage, and their installation a layer, of their own: they are installed again only when they change.
FROM ${BASE} AS requirements
COPY pyproject.toml .
RUN python3 -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *p['optional-dependencies']['operator'], sep='\n')" > /requirements.txt

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/decodefleet
WORKDIR /src
COPY --from=requirements /requirements.txt .
COPY constraints.txt .
RUN /opt/decodefleet/bin/pip install -r requirements.txt -c constraints.txt
COPY pyproject.toml README.md hatch_build.py ./
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
