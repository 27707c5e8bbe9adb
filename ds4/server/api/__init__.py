"""One module per API dialect: request body to GenerationRequest, events to that dialect's JSON."""
