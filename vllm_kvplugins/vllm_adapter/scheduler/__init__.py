"""The scheduler process: block manager, scheduler mixin, connector and sessions."""
