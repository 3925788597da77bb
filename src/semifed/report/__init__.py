"""semifed.report"""
