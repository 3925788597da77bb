"""semifed.models"""
