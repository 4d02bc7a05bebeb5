"""From a request's messages to tokens: chat templates, tools, control tokens."""
