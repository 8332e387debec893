"""Start-up: command-line flags and the switch that turns a policy on."""
