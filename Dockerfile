# syntax=docker/dockerfile:1
# Untested: this file has been checked by eye and by tests/service/test_containers.py, and never built.
#
#   docker build -t inferencecenter .                                  for processors
#   docker build -t inferencecenter:cuda --build-arg BACKEND=cuda .    for NVIDIA GPUs
#
# EXTRAS=server,cluster adds Ray, for engines on other machines.
#
# CUDA_ARCHITECTURES are compute capabilities without the point, as CMake takes them: 61 is a GTX 1060. CUDA 13 does not
# support GPUs before 75 (Turing), so the images below stay at CUDA 12.

ARG BACKEND=cpu
ARG CUDA_VERSION=12.8.1
ARG CUDA_ARCHITECTURES="61;75;86;89"

# PORTABLE: the processor of the machine that runs the image is not that of the builder.
FROM ubuntu:24.04 AS build-cpu
ENV PORTABLE=1

FROM nvidia/cuda:${CUDA_VERSION}-devel-ubuntu24.04 AS build-cuda
ARG CUDA_ARCHITECTURES
# The driver is on the machine that runs the image; to link there is only its stub.
ENV PORTABLE=1 CUDA=1 CMAKE_ARGS="-DCMAKE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES}" \
    LIBRARY_PATH=/usr/local/cuda/lib64/stubs

FROM build-${BACKEND} AS build
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN python3 -m venv /opt/inferencecenter/venv
# llama.cpp first: it takes minutes, and changes only with its version.
COPY pyproject.toml ./
COPY tools/llama tools/llama
RUN /opt/inferencecenter/venv/bin/python -m tools.llama install && rm -r ~/.cache/inferencecenter
COPY . ./
ARG EXTRAS=server
RUN /opt/inferencecenter/venv/bin/pip install --no-cache-dir ".[${EXTRAS}]"

FROM ubuntu:24.04 AS runtime-cpu

FROM nvidia/cuda:${CUDA_VERSION}-runtime-ubuntu24.04 AS runtime-cuda

FROM runtime-${BACKEND}
# libgomp1: llama.cpp's threads.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends libgomp1 python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --home-dir /var/lib/inferencecenter --create-home --shell /usr/sbin/nologin inferencecenter
COPY --from=build /opt/inferencecenter/venv /opt/inferencecenter/venv
ENV PATH=/opt/inferencecenter/venv/bin:$PATH \
    INFERENCECENTER_STATE_DIR=/var/lib/inferencecenter \
    INFERENCECENTER_SERVER__HOST=0.0.0.0 \
    INFERENCECENTER_LOG__FORMAT=json \
    INFERENCECENTER_SERVER__SHUTDOWN_TIMEOUT_S=5
USER 10001
VOLUME /var/lib/inferencecenter
EXPOSE 3000
# Plain `docker stop` kills after 10 s. Running turns get 5 s of them; `docker run --stop-timeout 60` leaves room for all.
STOPSIGNAL SIGTERM
# It takes the address from the settings: port, base path and TLS.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["inferencecenter", "healthcheck"]
CMD ["inferencecenter", "serve"]
