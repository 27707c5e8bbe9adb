"""Writing model files: conversion to GGUF and random checkpoints. Nothing that serves a model imports this."""
