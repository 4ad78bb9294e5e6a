"""An HTTP server that generates text for the clients of OpenAI's interface: `linattn serve`."""
