"""Chats: messages, tools, templates, and which tokens of a rendered chat carry loss."""
