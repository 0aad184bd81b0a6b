"""Runs WebAssembly guests that use models through the wasi-nn interface: graph = model, execution context = session."""
