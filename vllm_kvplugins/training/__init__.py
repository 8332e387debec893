"""Offline training and measurement: the SeKV router and layer sensitivities.

Never imported while serving.
"""
