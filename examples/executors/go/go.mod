module ergon.example/executor

go 1.19
