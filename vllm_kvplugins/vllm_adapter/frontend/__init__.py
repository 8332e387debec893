"""The front end: request validation, chats, episodes and offline helpers."""
