#!/bin/sh
exec /opt/inferencecenter/venv/bin/python -m inferencecenter "$@"
